"""The checks of `freshet doctor`: settings, the machine, the stack, and its running parts."""
