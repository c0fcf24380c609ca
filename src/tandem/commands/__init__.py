"""The options of each command, composed of the options of its parts."""
