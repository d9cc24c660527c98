"""What `freshet doctor` looks at: settings, the machine, the stack, and what runs."""
