// Included by where.cpp; its directory is searched before include/.
#pragma once

constexpr const char* kFile = __FILE__;
