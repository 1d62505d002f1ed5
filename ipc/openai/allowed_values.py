"""Which values a field of a body may have, where its type names them."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

_STEP = re.compile(r"(\w+)|\[[^]]*\]")


def allowed_values(kind: type, path: str) -> list[str]:
    """Those at a path such as ``messages[0].role``, as in JSON without quotes; none if it may be
    anything."""
    kinds = [inspect.type_info(kind)]
    for name in _STEP.findall(path):
        kinds = [inner for one in kinds for inner in _inner(one, name)]
    return [_shown(value) for one in kinds for type_ in _alternatives(one) for value in getattr(type_, "values", ())]


def _inner(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of the field of that name; without one, of the items."""
    for type_ in _alternatives(kind):
        match type_:
            case inspect.StructType(fields=fields) if name:
                if type_.tag_field == name:
                    yield inspect.LiteralType((type_.tag,))
                yield from (field.type for field in fields if field.encode_name == name)
            case inspect.ListType(item_type=item) if not name:
                yield item
            case inspect.DictType(value_type=item) if not name:
                yield item


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
