"""The documentation site: `sphinx-build -W docs site` writes it to site/."""

import dion2_jax

project = "dion2_jax"
author = "The dion2_jax authors"
copyright = "The dion2_jax authors"
release = version = dion2_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures"]
myst_heading_anchors = 3

autodoc_preserve_defaults = True  # jnp.bfloat16, not what it prints as
autodoc_typehints = "none"  # ArrayLike prints as a union of ten types
python_maximum_signature_line_length = 80
default_role = "py:obj"  # `dion2` in a docstring is a link where there is a target
napoleon_use_rtype = False
napoleon_attr_annotations = False

html_theme = "furo"
html_title = f"dion2_jax {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
