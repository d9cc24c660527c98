"""The gateway: the one door for clients. Recommendations out, interactions in."""
