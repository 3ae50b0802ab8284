"""How the documentation is built: `make docs`. Nothing is fetched from the network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for generated.py

import scalewise

project = "scalewise"
author = "the scalewise authors"
project_copyright = "the scalewise authors, Apache-2.0"
version = release = scalewise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["build"]
templates_path: list[str] = []

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the log begins its days at the second level

default_role = "code"  # docstrings write code between single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False

nitpicky = True
nitpick_ignore_regex = [  # other people's names: their pages are not looked up, so that the build needs no network
    (r"py:.*", r"(torch|np|numpy|nn|pydantic|collections|pathlib|os|typing)(\..*)?"),
    (r"py:.*", r"(Any|Callable|Iterator|Mapping|Path|PathLike|Sequence|Self|Tensor|Optimizer|ParamsT|Parameter)"),
    (r"py:.*", r"(DistributedDataParallel|ConfigDict|optional|Literal|Number)"),
    (r"py:.*", r"scalewise\.runs\..*"),  # results of questions: their documents are in the contract
]

html_theme = "furo"
html_title = "scalewise"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
