"""Options that take the name of something of ours, or the import path of something that users bring."""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from tandem.utils.imports import is_import_path


@dataclass(frozen=True)
class OrImportPath:
    """`Annotated[Names | str, OrImportPath(Names)]`: what is no import path has to be one of the `names`, a Literal."""

    names: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def validate(value: Any, among_names: core_schema.ValidatorFunctionWrapHandler) -> Any:
            return value if isinstance(value, str) and is_import_path(value) else among_names(value)

        return core_schema.no_info_wrap_validator_function(validate, handler.generate_schema(self.names))
