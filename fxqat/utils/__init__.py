"""Small helpers without policy, and the re-exports ``state`` and ``utils`` that users import."""
