"""Options that commands share: those of a case, from its declaration (`case`); of files and workers (`shared`)."""
