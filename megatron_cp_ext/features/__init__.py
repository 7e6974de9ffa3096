"""Feature managers: one file for each concern, with its flags, rules and patches."""
