"""Views of a run as data, for the command line and other interfaces: its waits, requests and possible actions."""
