"""Which sequences get which tokens computed, in which step. Numbers only: no jax. The rules, with
where they are:

- A step has a budget of tokens. Decoding sequences come first, one token each; what is left goes
  to chunks of prompts (``prompt_chunks``), admitted ones before waiting ones, but that a short one
  of a client that runs nothing comes first in every second step. So a stream of prompts never
  starves a decode. Beside decodes there is no more left than keeps the step below
  their target for the time between tokens, by what steps have cost (``estimates``; ``update``
  is told their seconds). Without decodes, and with a flood of prompts, a step is no longer than
  pays, as one who comes next waits for its end. Long prompts get no more than a part of what is
  left, one after the other, as long as shorter prompts have a use for the rest.
- ``plan`` may be called again before the step before it has landed. A sequence counts its tokens
  in flight, so that one that will end by length is not planned again; one that ended otherwise has
  its late tokens dropped in ``update``.
- A decoding row may have drafts (``speculation``), tokens that are likely to follow. It samples
  behind each, and as many tokens land as there are drafts that were right, and one. Until then a
  sequence counts as if all were right: it has pages for them, and no more drafts than would end it.
  Those of a sequence with a constraint are the tokens that this forces or guesses, by and by.
- A sequence with a constraint is planned as others are, and its row does not sample in the step if
  the constraint has not answered yet what may come next: because the token before is in flight, or
  because the mask is late. The row's logits are kept (``late_samples``), it samples from them in a
  plan of its own (``plan_late``) when the answer has come (``resume``), and is not planned again
  before that; its neighbours don't wait for it. When it is preempted it keeps its constraint, which
  follows the tokens that have landed, and logits that are kept of it are dropped.
- A sequence is admitted (``admission``) when pages for all its known tokens are free beside what
  the running ones are expected to grow (``growth_reserve``), but for those that would yield to
  it: a prompt once admitted never waits for pages.
- A sequence whose turn it is and that cannot start now is passed by others (``backfill``), up to
  ``LOOKED_AT`` in a plan: its mask is late, another computes its prefix, the part of the step for
  long prompts is used up, or there are no pages. Its turn comes again in the next plan. The others
  leave what preempted sequences and the first long prompt need, or they are counted: a sequence
  that was passed by ``MOST_PASSED`` that took what it needs, always its equals in priority, is not
  passed again.
- A sequence with an adapter starts when that has a slot on the device, or can be given one
  (``adapter_slots``). It is passed by meanwhile, and not more often by others with adapters than
  one that lacks pages; those without keep nothing from it. Where all sequences of a slot are of a
  priority lower by the threshold or more, they are preempted for it.
- A sequence whose prefix is in host memory has slot and pages while it is copied back
  (``host_pages``), and computes nothing. Copies are part of a plan, and may be all of it.
- A full page is in the prefix cache from the plan on that computes it (``sequence_memory``). A
  sequence waits while another is computing a page of its prefix.
- A decoding sequence that finds no page waits for one whose last token is in flight. If there is
  none, the least important sequence is preempted, between clients one of those that hold most
  pages (``running_sequences``): it gives its pages at once, as the device runs steps in order,
  waits in front of the others, and later goes on from what is still in the prefix
  cache. A token that it has in flight is kept when it lands: until then the sequence is not
  admitted again.
- A waiting sequence may claim room that others have (``preemption`` says from whom). They are
  preempted at the beginning of the next plan, as what is in a step cannot give its pages to that
  step. The most important sequence is never preempted for pages or priority, so something always
  advances.
"""
