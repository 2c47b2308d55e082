"""OpenKTO: Kahneman-Tversky Optimization from thumbs-up / thumbs-down rows, on DeepSpeed."""

__version__ = "0.1.0"
