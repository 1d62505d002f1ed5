"""The first part of our TPU attention kernel: writes a step's keys and values to their pages.

All writes precede all reads, as rows of one step may share pages that one of them fills. Each
granule of tokens is fetched, updated and stored; many at a time, so that their transfers overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from caching.tpu.pallas_geometry import Geometry, Ref, Table, as_tokens, as_words, bits_of

AT_ONCE_BYTES = 2**23
"""On-chip memory for granules; 64 rows of one token and 8 heads in bfloat16 take 5 MB."""


class Granule(NamedTuple):
    """The destination of new tokens. All i32 scalars."""

    page: Array
    base: Array
    """The offset of its first token in the page, a multiple of the granule."""
    begin: Array
    past: Array
    """Its tokens ``begin:past`` are new."""
    token: Array
    """The step's token that goes to ``begin``."""


def write_rows(geometry: Geometry, table: Table, new: Ref, pages: Ref) -> None:
    """Copy ``new`` i32[T, kv_heads, width] (see ``replicated``) to ``pages``, and wait.

    Of the rows of the table's block.
    """

    def single(writer: Writer) -> None:
        begin, past = table.decodes()
        writer.write(past - begin, lambda index: _granule(geometry, table, begin + index, jnp.int32(0)))

    def several(writer: Writer) -> None:
        @pl.loop(*table.others())
        def _(row: Array) -> None:
            first = _context(table, row) // geometry.granule
            count = (table.kv_lens[row] + (geometry.granule - 1)) // geometry.granule - first
            writer.write(count, lambda index: _granule(geometry, table, row, index))

    _with_writer(geometry, new, pages, 1, table.blocks.rows, single)
    if geometry.tokens > 1:
        window = min(geometry.granule, geometry.tokens)
        _with_writer(geometry, new, pages, window, -(-geometry.tokens // geometry.granule) + 1, several)


def _with_writer(
    geometry: Geometry, new: Ref, pages: Ref, window: int, most: int, body: Callable[["Writer"], None]
) -> None:
    """Call ``body`` with room for up to ``most`` granules, ``window`` new tokens for each."""
    per_token = geometry.kv_heads * geometry.width
    one = per_token * (geometry.granule * geometry.dtype.itemsize + window * 4)
    room = max(1, min(most, AT_ONCE_BYTES // one))
    pl.run_scoped(
        lambda *refs: body(Writer(geometry, new, pages, *refs)),
        pltpu.VMEM((room, geometry.kv_heads, geometry.granule, geometry.width), geometry.dtype),
        pltpu.VMEM((room, window, geometry.kv_heads, geometry.width), jnp.int32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    )


def _context(table: Table, row: Array) -> Array:
    """Tokens of a row before this step."""
    context: Array = table.kv_lens[row] - (table.cu_q_lens[row + 1] - table.cu_q_lens[row])
    return context


def _granule(geometry: Geometry, table: Table, row: Array, index: Array) -> Granule:
    """The ``index``-th granule of a row with new tokens."""
    context = _context(table, row)
    start = (context // geometry.granule + index) * geometry.granule
    begin = jnp.maximum(context - start, 0)
    return Granule(
        page=table.page(row, start // geometry.page_size),
        base=start % geometry.page_size,
        begin=begin,
        past=jnp.minimum(table.kv_lens[row] - start, geometry.granule),
        token=table.cu_q_lens[row] + start + begin - context,
    )


@dataclass(frozen=True)
class Writer:
    """Copies granules through on-chip memory."""

    geometry: Geometry
    new: Ref
    pages: Ref
    granules: Ref
    """[room, kv_heads, granule, width] as in pages."""
    fresh: Ref
    """i32[room, window, kv_heads, width] the new tokens around each granule."""
    arrived: Ref
    left: Ref
    """Semaphores."""

    def write(self, count: Array, granule_at: Callable[[Array], Granule]) -> None:
        """Write ``count`` granules, as many at a time as there is room for."""
        room = self.granules.shape[0]

        @pl.loop(0, (count + (room - 1)) // room)
        def _(batch: Array) -> None:
            here = jnp.minimum(count - batch * room, room)
            for step in (self._fetch, self._await_fetched, self._fill_and_store, self._await_stored):

                @pl.loop(0, here)
                def _(slot: Array, step: Callable[[Array, Granule], None] = step) -> None:
                    step(slot, granule_at(batch * room + slot))

    def _fetch(self, slot: Array, granule: Granule) -> None:
        for copy in self._fetches(slot, granule):
            copy.start()

    def _await_fetched(self, slot: Array, granule: Granule) -> None:
        for copy in self._fetches(slot, granule):
            copy.wait()

    def _fill_and_store(self, slot: Array, granule: Granule) -> None:
        for head in range(self.geometry.kv_heads):
            self._fill(slot, granule, head)
        self._store(slot, granule).start()

    def _await_stored(self, slot: Array, granule: Granule) -> None:
        self._store(slot, granule).wait()

    def _fetches(self, slot: Array, granule: Granule) -> tuple[Ref, Ref]:
        window = self.new.at[pl.ds(self._first_fresh(granule), self.fresh.shape[1])]
        return (
            pltpu.make_async_copy(self._place(granule), self.granules.at[slot], self.arrived),
            pltpu.make_async_copy(window, self.fresh.at[slot], self.arrived),
        )

    def _store(self, slot: Array, granule: Granule) -> Ref:
        return pltpu.make_async_copy(self.granules.at[slot], self._place(granule), self.left)

    def _place(self, granule: Granule) -> Ref:
        base = pl.multiple_of(granule.base, self.geometry.granule)
        return self.pages.at[granule.page, :, pl.ds(base, self.geometry.granule), :]

    def _first_fresh(self, granule: Granule) -> Array:
        """The first token of the window: the granule's first new one, or earlier near the end."""
        return jnp.minimum(granule.token, self.geometry.tokens - self.fresh.shape[1])

    def _fill(self, slot: Array, granule: Granule, head: int) -> None:
        """Copy the new tokens of a head into their granule."""
        fetched = granule.token - self._first_fresh(granule)

        def put(token: Array, stored: Array) -> Array:
            mine = bits_of(self.geometry, stored.shape, token)
            given: Array = self.fresh[slot, fetched + token - granule.begin, pl.ds(head, 1), :]
            return (stored & ~mine) | (given & mine)

        stored = jax.lax.fori_loop(granule.begin, granule.past, put, as_words(self.granules[slot, head]))
        self.granules[slot, head] = as_tokens(stored, self.geometry.dtype)


def replicated(stored: Array) -> Array:
    """f[...] -> i32[...], each number repeated over the 32 bits: any offset has a copy of it."""
    bits = 8 * stored.dtype.itemsize
    if bits == 32:
        return jax.lax.bitcast_convert_type(stored, jnp.int32)
    unsigned = jax.lax.bitcast_convert_type(stored, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)
    repeated = unsigned * jnp.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    return jax.lax.bitcast_convert_type(repeated, jnp.int32)
