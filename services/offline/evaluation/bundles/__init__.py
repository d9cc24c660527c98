"""What a bundle is worth on data of one's own: `freshet evaluate`, `freshet compare` and `freshet inspect`."""
