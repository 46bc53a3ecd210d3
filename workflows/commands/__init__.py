"""What the commands do, without their output."""
