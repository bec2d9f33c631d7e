// See schemas_off.h.
#pragma pop_macro("STABLE_TORCH_LIBRARY")
#pragma pop_macro("STABLE_TORCH_LIBRARY_FRAGMENT")
#undef ATTNJOURNEY_NO_SCHEMAS
#undef ATTNJOURNEY_UNUSED_SCHEMAS
