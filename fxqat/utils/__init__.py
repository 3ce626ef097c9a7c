"""Small helpers without policy, and the re-exports that users know."""
