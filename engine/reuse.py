"""What sequences take from the prefix cache, and what they leave in it. Plain Python, no jax.

The choices of one prompt (SequenceRequest.group) share its blocks, unless windowed layers give them
back. Without a prefix cache they are named under a root of their group alone, so that nobody else
finds them or is told of them. Those that the group has left are not freed at once, but cached, and
evicted when their room is wanted: a choice that is tried again finds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_hash import root_hash
from engine.blocks import BlockPool
from engine.events import CacheChanged
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.types import Role


class Reuse:
    """Between the scheduler's sequences and the cache; without one, only siblings share."""

    def __init__(self, cache: PrefixCache | None, pool: BlockPool, *, siblings: bool) -> None:
        """`siblings`: the choices of a prompt share its blocks without a prefix cache too."""
        self._public = cache is not None
        self._siblings = siblings
        self._cache = cache or PrefixCache(pool, root_hash(b""), pool.block_size)
        self._block_size = pool.block_size
        self.queries = 0
        """Tokens that sequences begun here had to compute unless they were found."""
        self.hits = 0
        """Of those, tokens that were found."""

    def must_wait(self, sequence: Sequence) -> bool:
        """Another sequence is about to have computed what this one begins with."""
        return sequence.awaits is not None and self._cache.awaits(sequence.awaits)

    def find(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks that it can begin with; None: it `must_wait` for more of them."""
        cache, size = self._cache, self._block_size
        if not self._shares(sequence):
            return []
        if self.must_wait(sequence):
            return None
        self._name(sequence)
        most, multiple = self._reusable(sequence)
        found = cache.find(sequence.prefix, most // size)
        whole = _round_down(len(found) * size, multiple) // size
        if _is_waited_for(sequence):
            reach = cache.promised(sequence.prefix, len(found), most // size)
            reach = _round_down(reach * size, multiple) // size
            if reach > whole:
                sequence.awaits = sequence.prefix.hashes[reach - 1]
                cache.hurry(sequence.awaits, reach * size, sequence.request.priority)
                return None
        sequence.awaits = None
        return found[:whole]

    def begin(self, sequence: Sequence, found: list[int]) -> None:
        """It is admitted with what was found: `found` is referred to, and the rest promised."""
        if not self._shares(sequence):
            return
        sequence.reused = sequence.computed = sequence.scheduled = len(found) * self._block_size
        self._cache.take(sequence.prefix, found)
        if _is_waited_for(sequence):
            self._cache.promise(sequence.prefix)
        if _computes(sequence) and self._public:
            self.queries += len(sequence.tokens)
            self.hits += sequence.reused

    def of_prompt(self, sequence: Sequence) -> int:
        """Prompt tokens that were found, in whole hits; for its first new token alone, else 0.

        0 without a prefix cache: that siblings share is not told.
        """
        request = sequence.request
        first = sequence.output_count == len(request.output)
        if not self._public or not first or not _computes(sequence):
            return 0
        found = min(sequence.reused, len(request.prompt))
        return _round_down(found, self._cache.hit_tokens)

    def leave(self, sequence: Sequence) -> None:
        """More of its KV has been computed: others may find the blocks that are full by now."""
        if not self._shares(sequence):
            return
        prefix, full = sequence.prefix, sequence.computed // self._block_size
        if full > prefix.shared and not prefix.closed:
            self._name(sequence)
            sequence.blocks = self._cache.add(prefix, sequence.blocks, full, sequence.last_step)

    def end(self, sequence: Sequence) -> None:
        """Nothing more will be computed of it."""
        self._cache.withdraw(sequence.prefix)

    def changes(self) -> CacheChanged | None:
        """See PrefixCache.take_changes; None without a prefix cache."""
        changed = self._cache.take_changes()
        return changed if self._public else None

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """See PrefixCache.check_invariants."""
        owners = [(s.prefix, s.blocks.tolist()) for s in sequences if len(s.blocks)]
        self._cache.check_invariants(owners)

    def _shares(self, sequence: Sequence) -> bool:
        return self._public or (self._siblings and bool(sequence.request.group))

    def _name(self, sequence: Sequence) -> None:
        prefix = sequence.prefix
        if not self._public and prefix.root is None:
            prefix.root = root_hash(sequence.request.group)
        self._cache.name(prefix, sequence.tokens)

    def _reusable(self, sequence: Sequence) -> tuple[int, int]:
        """How many of its tokens need not be computed or fetched, and the step of hits.

        The logits of the last token are needed where a token is sampled. A request that asks for
        log-probabilities of its prompt needs all of them, so it has none to reuse. Siblings share
        all that they can: their tails should be short.
        """
        if not _computes(sequence):
            return len(sequence.tokens), self._block_size
        step = self._block_size if sequence.request.group else self._cache.hit_tokens
        if sequence.sampling.needs_all_logits:
            return 0, step
        return len(sequence.tokens) - 1, step


def _computes(sequence: Sequence) -> bool:
    """It computes its prompt here, rather than import it."""
    return Role.PREFILL in sequence.request.roles


def _is_waited_for(sequence: Sequence) -> bool:
    """Others wait for its KV, and it for theirs: among imports, only where it has siblings."""
    return _computes(sequence) or bool(sequence.request.group)


def _round_down(tokens: int, multiple: int) -> int:
    return tokens // multiple * multiple
