"""One file, one question: Config -> run -> dataset -> plot."""
