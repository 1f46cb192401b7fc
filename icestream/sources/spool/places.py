"""Which kind of spool a place is."""

import re
from collections.abc import Mapping

from icestream.sources.spool import Spool, is_folder
from icestream.sources.spool.local import LocalSpool
from icestream.sources.spool.storage import StorageSpool


def open_spool(
    where: str, storage: Mapping[str, str], pipeline: str, stream: str, looks_only: bool = False
) -> Spool:
    """A spool for one run: in a folder, the system's own when none is named, or on a storage.

    `stream` names what is read, of which there is one reader at a time. With `looks_only` nothing
    of other runs is removed.
    """
    place = re.sub("^file:(//(localhost)?(?=/))?(?=/)", "", where)
    if is_folder(place):
        return LocalSpool(place, pipeline, looks_only)
    return StorageSpool(place, storage, pipeline, stream)
