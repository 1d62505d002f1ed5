"""Logits of excluded tokens, highest first: one is sampled only if all logits above it are gone.

All are finite, as an infinite logit counts as a fault of the model. They are so far apart that no
bias, penalty or temperature of a request moves one to the next, or to a logit of the model.
NO_TOKEN_LOGIT of engine/vocabulary.py is between NOT_ALLOWED and MASKED_OUT.
"""

import numpy as np

REMOVED = np.float32(-1e30)
"""Banned by bad_words, or by min_tokens because it would end the sequence."""

NOT_ALLOWED = np.float32(-1e36)
"""Not among allowed_token_ids. If all of those are banned, one of them is sampled still."""

MASKED_OUT = np.finfo(np.float32).min
"""Excluded by a constraint, which overrides all else."""
