"""What a benchmark sends: requests with lengths, contents, arrivals and labels, drawn from a seed and the same everywhere."""

from core.loads.draw import draw_load, filled_labels
from core.loads.load import Load
from core.loads.settings import LoadSettings

__all__ = ["Load", "LoadSettings", "draw_load", "filled_labels"]
