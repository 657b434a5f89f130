"""Sphinx settings: ``sphinx-build -W docs docs/_build``."""

import modelsummary

project = "modelsummary"
copyright = "the modelsummary authors"
release = modelsummary.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_extra_path = ["llms.txt"]
html_theme = "furo"
nb_execution_mode = "auto"  # tutorials are kept without their outputs
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # progress bars, and what other libraries say while they are imported
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures show the types
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_default_options = {
    "members": True,
    "inherited-members": "object,ReadableNumbers,ModelStatistics,Generic,BaseException,"
    "Module,Sequential,GraphModule,tuple,str,int",
}
