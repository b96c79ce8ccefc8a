"""The loss of gSASRec: binary cross entropy over drawn negatives, corrected for the overconfidence that drawing
causes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...checks import check_count, check_number


def calibrated_bce(logits: Tensor, own: Tensor, *, items: int, calibration: float = 0.75) -> Tensor:
    """Return the binary cross entropy of the next item at each place and of drawn items, with a calibrated positive
    part.

    A model that is trained with few of all negatives overestimates the probability of every next item. So the
    logarithm of the probability of the next item has the factor ``beta = a * (calibration * (1 - 1 / a) + 1 / a)``,
    where ``a = negatives / (items - 1)`` is the share of the negatives that is drawn (gBCE; Petrov and Macdonald,
    RecSys 2023, doi:10.1145/3604915.3608783, section 5). The logits must be plain dot products: use `SASRec` with
    ``temperature=None``. The loss is for `fit`: ``loss=functools.partial(calibrated_bce, items=size - 2)``.

    Args:
        logits: The logits that `SASRec.forward` returns, shape (places, 1 + negatives). A logit of -inf does not count
            as a negative.
        own: The place of the next item in each row; zeros, shape (places,).
        items: The number of items that negatives are drawn from, at least 2.
        calibration: From 0, binary cross entropy, to 1, the probabilities that training with all negatives would give.

    Returns:
        The mean over all places and their 1 + negatives logits.

    Raises:
        TypeError, ValueError: `items` or `calibration` is out of range; there are no negatives.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import calibrated_bce
        >>> logits, own = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([0])
        >>> calibrated_bce(logits, own, items=101, calibration=0.0)  # plain binary cross entropy
        tensor(0.4714)
        >>> calibrated_bce(logits, own, items=101, calibration=1.0)
        tensor(0.4300)
    """
    check_count(items, least=2, name="`items`")
    check_number(calibration, least=0.0, name="`calibration`")
    if calibration > 1:
        raise ValueError(f"`calibration` must be from 0 to 1, got {calibration}")
    negatives = logits.shape[1] - 1
    if negatives < 1:
        raise ValueError("`logits` must have a column of the next item and one for each negative, got one column")
    share = min(negatives / (items - 1), 1.0)
    beta = share * (calibration * (1 - 1 / share) + 1 / share)
    first = torch.arange(logits.shape[1], device=logits.device) == own[:, None]
    each = torch.where(first, beta * logsigmoid(logits), logsigmoid(-logits))  # (places, 1 + negatives)
    return -each.mean()
