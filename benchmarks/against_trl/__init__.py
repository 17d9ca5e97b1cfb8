"""TRL's GRPO trainer beside ours. Not called ``trl``: beside a script, that would hide the real
package.
"""
