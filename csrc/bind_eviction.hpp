// The part of CacheCore's Python face that is about eviction, and the replay of traces.
#pragma once

#include <nanobind/nanobind.h>

#include "cache/cache_core.hpp"

void bind_eviction(nanobind::module_ &m, nanobind::class_<pagemill::cache::CacheCore> &core);
