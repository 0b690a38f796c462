"""flash-attn's functions, computed by dilkit on any device.

from dilkit.integrations.flash_attn import flash_attn_func      in place of      from flash_attn import flash_attn_func
"""

from dilkit.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from dilkit.integrations.flash_attn.installation import install
from dilkit.integrations.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
