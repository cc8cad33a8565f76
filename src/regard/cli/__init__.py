"""The command line: one file per command. Data goes to stdout, messages to stderr.

Exit code 0: done; 1: a law is broken or a lesson's claim fails; 2: a bad request; 130: interrupted.
"""
