"""What a block of threads writes: operands, outer scales, codes, scale bytes, guidance bits."""

from typing import Any

from pallas_kernels.quantize.plan import Lane, Ops, Place, Plan, Refs


def _words(ops: Ops, block: dict[str, Any], fold: Lane | None) -> list[Lane]:
    """The lane's products of a block as pairs of bfloat16."""
    products = block["products"] if fold is None else [p * fold for p in block["products"]]
    halves = [ops.bits(p) | sign for p, sign in zip(products, block["signs"], strict=True)]
    return [ops.halves_to_word(low, high) for low, high in zip(halves[0::2], halves[1::2], strict=True)]


def store_operand(
    ops: Ops, plan: Plan, ref: Any, place: Place, blocks: list[dict[str, Any]], fold: Lane | None
) -> None:
    words = [_words(ops, block, fold) for block in blocks]
    count, task = len(words[0]), plan.task
    start = (place.row * plan.columns + place.chunk * task.chunk) >> 1
    if task.order == "kernel":
        mixed = [words[block][j] for j in range(count) for block in range(4)]
        ops.store(ref, start + place.lane * (4 * count), mixed, place.valid)
        return
    for block in range(4):
        at = start + block * (task.block // 2) + place.lane * count
        ops.store(ref, at, words[block], place.valid)


def store_outer(ops: Ops, plan: Plan, ref: Any, place: Place, quad: Lane, outer: dict[str, Any]) -> None:
    if ref is None:
        return
    first = ops.both(ops.equal(place.lane, ops.uint(0)), ops.equal(quad, ops.uint(0)))
    if plan.m % plan.rows:
        first = ops.both(first, place.row < plan.m)
    ops.store(ref, place.row, [outer["exponent"] << 23], first)


def store_codes(ops: Ops, plan: Plan, refs: Refs, place: Place, blocks: list[dict[str, Any]]) -> None:
    task = plan.task
    if not task.wants_scales:
        return
    chunk = place.row * plan.steps + place.chunk
    _scales(ops, plan, refs.scales, place, chunk, blocks)
    codes = []
    for block in blocks:
        alive = block["scale"]["sign"] > ops.uint(0)
        plain = [task.form.code(ops, e) for e in block["elements"]]
        codes.append([ops.where(alive, code, ops.uint(0)) for code in plain])
    quarter = plan.quarter
    if task.codes:
        signed = [
            [code | (sign >> 28) for code, sign in zip(part, block["signs"], strict=True)]
            for part, block in zip(codes, blocks, strict=True)
        ]
        pieces = [_joined(part, 4) for part in signed]
        words = _gathered(ops, place.lane, pieces, min(32, 4 * quarter))
        size = task.chunk // 8  # words of a chunk
        ops.store(refs.packed, chunk * size + place.lane * (size // 4), words, place.valid)
    if task.compact:
        pieces = [_joined([code & 1 for code in part], 1) for part in codes]
        words = _gathered(ops, place.lane, pieces, quarter)
        size = task.chunk // 32
        if len(words) * 4 == size:
            ops.store(refs.bits, chunk * size + place.lane * len(words), words, place.valid)
            return
        # half a word a lane: the even lane of two writes both
        both = words[0] | (ops.from_lane(words[0], 1) << 16)
        even = ops.equal(place.lane & 1, ops.uint(0))
        valid = even if place.valid is None else ops.both(even, place.valid)
        ops.store(refs.bits, chunk * size + (place.lane >> 1), [both], valid)


def _scales(ops: Ops, plan: Plan, ref: Any, place: Place, chunk: Lane, blocks: list[dict[str, Any]]) -> None:
    """Four scale bytes, or four words of HiF4, by the first lane of the quad."""
    task = plan.task
    data = [task.form.scale_bytes(ops, block["scale"]) for block in blocks]
    if task.fmt == "hif4":
        data = [_hif4_word(ops, place.lane, byte, block) for byte, block in zip(data, blocks, strict=True)]
        at = chunk << 2
    else:
        data, at = [data[0] | (data[1] << 8) | (data[2] << 16) | (data[3] << 24)], chunk
    first = ops.equal(place.lane, ops.uint(0))
    ops.store(ref, at, data, first if place.valid is None else ops.both(first, place.valid))


def _hif4_word(ops: Ops, lane: Lane, byte: Lane, block: dict[str, Any]) -> Lane:
    """E6M2, eight bits of level 2 and sixteen of level 3 of a block; all ones below E6M2 where poisoned."""
    two = _joined([_is_two(ops, x) for x in block["two"]], 1)[0] << (lane << 1)
    three = _joined([_is_two(ops, x) for x in block["three"]], 1)[0] << (lane << 2)
    fine = (two << 8) | (three << 16)
    for distance in (1, 2):
        fine = fine | ops.from_lane(fine, distance)
    alive = block["scale"]["sign"] > ops.uint(0)
    return byte | ops.where(alive, fine, ops.uint(0))


def _is_two(ops: Ops, factor: Lane) -> Lane:
    return ops.where(factor > ops.real(1.5), ops.uint(1), ops.uint(0))


def _joined(fields: list[Lane], width: int) -> list[Lane]:
    """Fields of `width` bits in words, the first lowest."""
    per_word = 32 // width
    words = []
    for start in range(0, len(fields), per_word):
        word = fields[start]
        for i, field in enumerate(fields[start + 1 : start + per_word], 1):
            word = word | (field << (width * i))
        words.append(word)
    return words


def _gathered(ops: Ops, lane: Lane, pieces: list[list[Lane]], width: int) -> list[Lane]:
    """From lanes that hold a piece of every block to lanes that hold a block: lane q gets block q.

    A piece is words of `width` bits; the pieces of lanes 0 to 3 follow each other.
    """
    columns = [_transposed(ops, lane, [piece[i] for piece in pieces]) for i in range(len(pieces[0]))]
    in_order = [column[p] for p in range(4) for column in columns]
    return _joined(in_order, width)


def _transposed(ops: Ops, lane: Lane, rows: list[Lane]) -> list[Lane]:
    """Lane q's element p becomes lane p's element q, within a quad."""
    for distance in (1, 2):
        upper = (lane & distance) > ops.uint(0)
        for low in [i for i in range(4) if not i & distance]:
            a, b = rows[low], rows[low + distance]
            other = ops.from_lane(ops.where(upper, a, b), distance)
            rows[low], rows[low + distance] = ops.where(upper, other, a), ops.where(upper, b, other)
    return rows
