"""The commands, a module each. This is run first, whichever it is: their own imports take a second or more."""

from tandem.utils.processes import begin_command

begin_command()
