"""Prints the bill of materials of an installed distribution, as CycloneDX JSON: `python sbom.py keepstep`.

It reads nothing but the metadata of the environment that runs it, and uses nothing but the standard library and pip.
The same environment gives the same text: it holds no time, no path and no name of a machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

SPEC = "1.6"


def needs(dist: Distribution, extras: set[str]) -> list[tuple[Requirement, bool]]:
    """What a distribution needs in this environment with these extras, and whether an extra alone asks for it."""
    found = []
    for line in dist.requires or ():
        one = Requirement(line)
        always = one.marker is None or one.marker.evaluate({"extra": ""})
        if always or any(one.marker.evaluate({"extra": extra}) for extra in extras):
            found.append((one, not always))
    return found


def installed(name: str) -> tuple[dict[str, Distribution], dict[str, list[str]], set[str]]:
    """Everything that a distribution needs and that is there: by name, what each needs, and which are not optional."""
    there: dict[str, Distribution] = {}
    needed: dict[str, set[str]] = {}
    required: set[str] = set()
    root = distribution(name)
    waiting = [(name, frozenset(root.metadata.get_all("Provides-Extra") or ()), True)]
    seen = set()
    while waiting:
        one, extras, is_required = waiting.pop()
        key = canonicalize_name(one)
        if is_required:
            required.add(key)
        if (key, extras, is_required) in seen:
            continue
        seen.add((key, extras, is_required))
        there[key] = dist = distribution(one)
        needed.setdefault(key, set())
        for requirement, is_extra in needs(dist, set(extras)):
            try:
                distribution(requirement.name)
            except PackageNotFoundError:
                continue  # of an extra that is not installed
            needed[key].add(canonicalize_name(requirement.name))
            waiting.append((requirement.name, frozenset(requirement.extras), is_required and not is_extra))
    return there, {key: sorted(others) for key, others in needed.items()}, required


def component(dist: Distribution, *, required: bool) -> dict[str, Any]:
    name, version = canonicalize_name(dist.metadata["Name"]), dist.version
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "scope": "required" if required else "optional",
    }
    if summary := dist.metadata["Summary"]:
        found["description"] = summary
    licence = dist.metadata["License-Expression"]
    if licence:
        found["licenses"] = [{"expression": licence}]
    else:
        classifiers = dist.metadata.get_all("Classifier") or []
        named = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::")]
        text = (dist.metadata["License"] or "").strip()
        if not named and text and "\n" not in text:
            named = [text]
        if named:
            found["licenses"] = [{"license": {"name": one}} for one in named]
    return found


def sbom(name: str, wheel: bytes = b"") -> dict[str, Any]:
    """The bill of materials of an installed distribution; the wheel that it was installed from is named by its hash."""
    there, needed, required = installed(name)
    key = canonicalize_name(name)
    root = component(there[key], required=True)
    del root["scope"]
    if wheel:
        root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel).hexdigest()}]
    refs = {one: component(dist, required=one in required)["bom-ref"] for one, dist in there.items()}
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"component": root},
        "components": [component(there[one], required=one in required) for one in sorted(there) if one != key],
        "dependencies": [
            {"ref": refs[one], "dependsOn": [refs[other] for other in needed[one]]} for one in sorted(there)
        ],
    }
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    return {"bomFormat": bom["bomFormat"], "specVersion": SPEC, "serialNumber": f"urn:uuid:{identity}", **bom}


if __name__ == "__main__":
    with open(sys.argv[2], "rb") as file:  # noqa: PTH123 - a script without imports of its own
        print(json.dumps(sbom(sys.argv[1], file.read()), indent=2, ensure_ascii=False))
