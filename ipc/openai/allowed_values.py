"""Which values a field of a body may have, where its type names them, and which fields there are."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

_STEP = re.compile(r"(\w+)|\[[^]]*\]")


def allowed_values(kind: type, path: str) -> list[str]:
    """Those at a path such as ``messages[0].role``, as in JSON without quotes; none if it may be
    anything."""
    return [_shown(value) for type_ in _types(kind, path) for value in getattr(type_, "values", ())]


def field_names(kind: type, path: str) -> list[str]:
    """The names of the fields of the object at a path, which is empty for the body itself."""
    objects = (type_ for type_ in _types(kind, path) if isinstance(type_, inspect.StructType))
    return [field.encode_name for type_ in objects for field in type_.fields]


def _types(kind: type, path: str) -> list[inspect.Type]:
    """The alternatives of what may be at that path."""
    kinds = [inspect.type_info(kind)]
    for name in _STEP.findall(path):
        kinds = [inner for one in kinds for inner in _inner(one, name)]
    return [type_ for one in kinds for type_ in _alternatives(one)]


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
