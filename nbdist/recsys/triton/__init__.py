"""Export of a fitted workflow and a trained model as a Triton ensemble, whose requests contain raw ids and strings."""

from .export import Ensemble, export_ensemble
from .served.preprocess import (
    NULL,
    NULL_FLOAT_BITS,
    NULL_STRING,
    NULL_UNSIGNED,
    PADDING,
    PADDING_STRING,
    PADDING_UNSIGNED,
)
from .serving import Server, serve

__all__ = [
    "NULL",
    "NULL_FLOAT_BITS",
    "NULL_STRING",
    "NULL_UNSIGNED",
    "PADDING",
    "PADDING_STRING",
    "PADDING_UNSIGNED",
    "Ensemble",
    "Server",
    "export_ensemble",
    "serve",
]
