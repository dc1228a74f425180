"""The backward of a ring. Elements are of one token of a rank."""


def backward_elements(q: int, kv: int, sums: float, size: int, layout: str, *, beside_step: int = 0) -> float:
    """Beside the output's gradient: what a rank holds as a kernel begins, the kernel's own work space, and what it
    finds. q, kv: width of all query heads, and of all key heads. sums: where the kernel adds up dk and dv of a key.
    beside_step: what each step also has."""
    # Of a shard, the queries and the keys of a kernel. In zigzag order the last rank computes all its queries and half
    # of each other shard's keys, and the first rank half of its queries and whole shards.
    blocks = ((1.0, 0.5), (0.5, 1.0)) if layout in ("zigzag", "zigzag_by_kind") else ((1.0, 1.0),)
    half_of_own = 1.5 * q + 0.5 * sums + kv
    found: list[float] = []
    for queries, keys in blocks:
        first, *steps, last = ring_held_elements(q, kv, size, queries)
        of_step = queries * 3 * q + keys * (sums + 2 * kv) + beside_step
        found += [first + half_of_own, *(held + of_step for held in steps), last + half_of_own]
    return max(found)


def ring_held_elements(q: int, kv: int, size: int, queries: float) -> list[float]:
    """What a ring of `size` ranks holds in bfloat16 as each kernel of its backward begins, beside its
    inputs. First and last are two halves of the own heads; between them is a step for each other rank. `queries`: which
    part of the rank's queries sees keys of another shard."""
    own, at_hand = 2 * kv, 2 * kv  # keys and values
    parts = 0.5 * q  # of dq that are not merged yet: of half the own heads, and then of each step
    held: list[float] = [own + at_hand]
    for step in range(1, size):
        next_one = 2 * kv if step < size - 1 else 0
        sums = 4 * kv if step > 1 else 0  # of dk and dv: those that leave, and those that arrive
        held.append(own + at_hand + next_one + sums + kv + parts)  # kv: dk and dv of half the own heads
        parts += queries * q
        parts = 2 * q if parts >= 3 * q else parts  # merged, in fp32
    return [*held, own + 4 * kv + kv + parts]
