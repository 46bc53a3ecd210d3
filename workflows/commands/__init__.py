"""The work of the commands, without their output."""
