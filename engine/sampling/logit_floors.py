"""Logits of tokens that are not to be drawn, in their order: a higher one is drawn only where all others are lower.

All are finite, as a row with infinity is taken for a fault of the model, and so far apart that no bias, penalty or
temperature that a request may have brings one to the next, or to a logit that a model gives. NO_TOKEN_LOGIT of
engine/vocabulary.py lies between NOT_ALLOWED and MASKED_OUT.
"""

import numpy as np

REMOVED = np.float32(-1e30)
"""Banned: by bad_words, or by min_tokens as it would end the sequence."""

NOT_ALLOWED = np.float32(-1e36)
"""Not among allowed_token_ids. Where those are all banned after some token, it is one of them that is drawn."""

MASKED_OUT = np.finfo(np.float32).min
"""What a constraint does not allow, which has the last word."""
