"""What a run moved, computed and waited for; `Profile` and how it is shown."""
