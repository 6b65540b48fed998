"""Every setting with its type, default and meaning: a module for each table of a file.

A setting is a key in a file (``[rollouts] group_size``), an environment variable
(``AGENTRL_ROLLOUTS__GROUP_SIZE``) and a flag (``--rollouts.group-size``); ``config.loading`` reads
them. Relative paths are relative to the working directory. Checks that concern several settings are
in ``config.checks``.
"""
