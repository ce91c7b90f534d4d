"""`task=bench`: runs a load several times and says how fast, where the time went, and how far from the limit that is."""
