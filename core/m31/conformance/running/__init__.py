"""The machine around the items: processes, journal, recorded evidence, and the run as a whole."""
