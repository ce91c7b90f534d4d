"""Plugins with one defect each, and the words in which the conformance kit must name it. A defect is one change to a plugin
that passes: whatever else the kit finds follows from it."""
