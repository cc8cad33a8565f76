"""The command line: one file a verb. Data goes to stdout, talk to stderr; 0 done, 1 a law is broken, 2 refused."""
