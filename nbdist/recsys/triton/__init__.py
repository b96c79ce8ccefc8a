"""A fitted workflow and a trained model as a Triton ensemble, which takes raw ids and strings and answers."""

from .export import Ensemble, export_ensemble
from .served.preprocess import NULL, NULL_STRING, PADDING, PADDING_STRING
from .serving import Server, serve

__all__ = ["NULL", "NULL_STRING", "PADDING", "PADDING_STRING", "Ensemble", "Server", "export_ensemble", "serve"]
