"""Options that commands share: those of a case, derived from its declaration (`case`); of files and workers (`shared`)."""
