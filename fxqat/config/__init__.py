"""What the user asked for, checked."""
