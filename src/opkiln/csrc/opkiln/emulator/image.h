// Reads this library's own file for reports: the names of kernels and shared variables, and
// the source line of an instruction. Included by runtime.cpp only.
#pragma once

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace opk {
namespace emulator {

// A __shared__ variable. It is compiled as thread_local, so it has a place in the library's TLS block.
struct SharedVariable {
  uintptr_t offset;  // in the TLS block
  std::size_t size;
  const char* symbol;
  const char* function;  // the symbol of its function; null if all calls of it are inlined
};

inline std::string demangle(const char* symbol) {
  int status = 0;
  char* const text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = text != nullptr ? text : symbol;
  std::free(text);
  for (const char* part : {"(anonymous namespace)::", "void "}) {
    for (std::size_t at; (at = name.find(part)) != std::string::npos;) {
      name.erase(at, std::strlen(part));
    }
  }
  return name;
}

class Image {
 public:
  // The thread_local variable from whose address the others are computed.
  static constexpr const char* kMark = "opkiln_emulator_launch";

  Image() {
    dl_iterate_phdr(&Image::look, this);
    read_file();
  }

  // Whether the address is in a segment loaded from the file: code, constants, __device__ variables.
  bool holds(uintptr_t address) const {
    return address - begin_ < end_ - begin_;
  }

  // The library's TLS block in this thread, computed from the address of the variable that `kMark` names.
  // (dl_iterate_phdr returns null for blocks that the loader keeps outside of its tables.)
  uintptr_t tls_block(const void* mark) const {
    return has_mark_ ? reinterpret_cast<uintptr_t>(mark) - mark_ : 0;
  }

  const std::vector<SharedVariable>& shared_variables() const {
    return shared_;
  }

  uintptr_t offset_of(const void* code) const {
    return reinterpret_cast<uintptr_t>(code) - base_;
  }

  // The symbol of the function that contains an address, or null.
  const char* symbol(const void* code) const {
    const uintptr_t at = offset_of(code);
    for (const Symbol& symbol : functions_) {
      if (at - symbol.value < std::max<std::size_t>(symbol.size, 1)) {
        return symbol.name;
      }
    }
    return nullptr;
  }

  std::string function(const void* code) const {
    const char* const found = symbol(code);
    return found != nullptr ? demangle(found) : "a kernel";
  }

  // Whether a symbol is this function, or the compiler's copy of it ("name.isra.0").
  static bool is_of(const char* symbol, const char* function) {
    const std::size_t length = std::strcspn(function, ".");
    return std::strcspn(symbol, ".") == length && std::strncmp(symbol, function, length) == 0;
  }

  // The source line of an instruction, "file.cu:12", or the function's name if the file has no line table.
  std::string line(uintptr_t offset) const {
    Row best{};
    walk_lines([&](const Row& row, const Row& author, const Row& next) {
      if (row.address <= offset && offset < next.address) {
        // For code inlined from the emulator's headers, the report names the author's line before it.
        const bool inlined = row.own && author.file != nullptr &&
            symbol(at_offset(author.address)) == symbol(at_offset(offset));
        best = inlined ? author : row;
      }
    });
    if (best.file == nullptr) {
      return function(at_offset(offset));
    }
    const char* file = best.file;
    for (const char* prefix : {"/opkiln/src/", "/opkiln/opkiln/", "/opkiln/build/"}) {
      if (std::strncmp(file, prefix, std::strlen(prefix)) == 0) {
        file += std::strlen(prefix);
      }
    }
    return std::string(file) + ":" + std::to_string(best.line);
  }

 private:
  const void* at_offset(uintptr_t offset) const {
    return reinterpret_cast<const void*>(offset + base_);
  }

  struct Symbol {
    uintptr_t value;
    std::size_t size;
    const char* name;
  };
  struct File {
    const char* name;
    bool own;  // one of the emulator's headers
  };
  struct Row {
    uintptr_t address;
    const char* file;
    unsigned line;
    bool own;
  };

  static int look(dl_phdr_info* info, std::size_t, void* data) {
    Image* const image = static_cast<Image*>(data);
    const auto here = reinterpret_cast<uintptr_t>(&Image::look);
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& header = info->dlpi_phdr[i];
      if (header.p_type == PT_LOAD) {
        begin = std::min<uintptr_t>(begin, info->dlpi_addr + header.p_vaddr);
        end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
      }
    }
    if (here < begin || here >= end) {
      return 0;
    }
    image->base_ = info->dlpi_addr;
    image->begin_ = begin;
    image->end_ = end;
    image->path_ = info->dlpi_name != nullptr && *info->dlpi_name ? info->dlpi_name : "/proc/self/exe";
    return 1;
  }

  void read_file() {
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0 ||
        static_cast<std::size_t>(status.st_size) < sizeof(ElfW(Ehdr))) {
      if (file >= 0) {
        close(file);
      }
      return;
    }
    size_ = static_cast<std::size_t>(status.st_size);
    void* const mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
      return;
    }
    bytes_ = static_cast<const char*>(mapped);
    const auto* const header = reinterpret_cast<const ElfW(Ehdr)*>(bytes_);
    if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_shoff + header->e_shnum * sizeof(ElfW(Shdr)) > size_) {
      return;
    }
    const auto* const sections = reinterpret_cast<const ElfW(Shdr)*>(bytes_ + header->e_shoff);
    const char* const names = bytes_ + sections[header->e_shstrndx].sh_offset;
    for (unsigned i = 0; i < header->e_shnum; ++i) {
      const ElfW(Shdr)& section = sections[i];
      if (section.sh_type == SHT_SYMTAB) {
        read_symbols(section, bytes_ + sections[section.sh_link].sh_offset);
      } else if (std::strcmp(names + section.sh_name, ".debug_line") == 0 &&
                 (section.sh_flags & SHF_COMPRESSED) == 0) {
        lines_ = bytes_ + section.sh_offset;
        lines_end_ = lines_ + section.sh_size;
      }
    }
  }

  void read_symbols(const ElfW(Shdr)& table, const char* names) {
    const auto* const symbols = reinterpret_cast<const ElfW(Sym)*>(bytes_ + table.sh_offset);
    for (std::size_t i = 0; i < table.sh_size / sizeof(ElfW(Sym)); ++i) {
      const ElfW(Sym)& symbol = symbols[i];
      const char* const name = names + symbol.st_name;
      const int type = ELF64_ST_TYPE(symbol.st_info);
      if (symbol.st_shndx == SHN_UNDEF) {
        continue;
      }
      if (type == STT_FUNC) {
        functions_.push_back({symbol.st_value, symbol.st_size, name});
      } else if (type == STT_TLS && std::strncmp(name, "_ZZ", 3) == 0) {
        // Shared variables are local to functions. The emulator's and op.h's own are in namespaces.
        shared_.push_back({symbol.st_value, symbol.st_size, name, nullptr});
      } else if (type == STT_TLS && std::strcmp(name, kMark) == 0) {
        mark_ = symbol.st_value;
        has_mark_ = true;
      }
    }
    // For example, _ZZ4tilePfE6buffer belongs to the function _Z4tilePf.
    for (SharedVariable& variable : shared_) {
      for (const Symbol& each : functions_) {
        const std::size_t length = std::strcspn(each.name, ".");
        if (std::strncmp(each.name, "_Z", 2) == 0 &&
            std::strncmp(variable.symbol + 3, each.name + 2, length - 2) == 0 &&
            variable.symbol[length + 1] == 'E') {
          variable.function = each.name;
        }
      }
    }
  }

  // Reads DWARF 4, which the emulator's builds request with -gdwarf-4. Other versions are skipped.
  template <class Visit>
  void walk_lines(const Visit& visit) const {
    const char* at = lines_;
    while (at != nullptr && at + 4 < lines_end_) {
      uint32_t length;
      std::memcpy(&length, at, 4);
      const char* const end = at + 4 + length;
      if (length >= 0xfffffff0u || end > lines_end_) {
        return;
      }
      uint16_t version;
      std::memcpy(&version, at + 4, 2);
      if (version == 4) {
        walk_unit(at + 6, end, visit);
      }
      at = end;
    }
  }

  static uint64_t read_unsigned(const char*& at) {
    uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(*at++);
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) {
        return value;
      }
    }
  }

  static int64_t read_signed(const char*& at) {
    int64_t value = 0;
    for (unsigned shift = 0;;) {
      const auto byte = static_cast<unsigned char>(*at++);
      value |= static_cast<int64_t>(byte & 127) << shift;
      shift += 7;
      if (byte < 128) {
        return byte & 64 && shift < 64 ? value | -(int64_t{1} << shift) : value;
      }
    }
  }

  template <class Visit>
  static void walk_unit(const char* at, const char* end, const Visit& visit) {
    uint32_t header_length;
    std::memcpy(&header_length, at, 4);
    const char* program = at + 4 + header_length;
    at += 4;
    const auto smallest = static_cast<unsigned char>(at[0]);
    const auto line_base = static_cast<signed char>(at[3]);
    const auto line_range = static_cast<unsigned char>(at[4]);
    const auto opcode_base = static_cast<unsigned char>(at[5]);
    const char* const lengths = at + 6;  // operand counts of the standard opcodes, from opcode 1 on
    at = lengths + opcode_base - 1;
    std::vector<bool> own_directory{false};
    while (*at != 0) {
      own_directory.push_back(std::strstr(at, "csrc/opkiln/emulator") != nullptr);
      at += std::strlen(at) + 1;
    }
    std::vector<File> files{File{}};
    for (++at; *at != 0;) {
      const char* const name = at;
      at += std::strlen(at) + 1;
      const uint64_t directory = read_unsigned(at);
      files.push_back({name, directory < own_directory.size() && own_directory[directory]});
      read_unsigned(at);  // modification time
      read_unsigned(at);  // file length
    }
    uintptr_t address = 0;
    uint64_t file = 1;
    int64_t line = 1;
    Row last{}, author{};  // the last row, and the last row outside of the emulator
    const auto emit = [&](bool ends) {
      const File in = file < files.size() ? files[file] : File{};
      const Row row{address, in.name, static_cast<unsigned>(line), in.own};
      if (last.file != nullptr) {
        visit(last, author, row);
      }
      last = ends ? Row{} : row;
      if (ends || !row.own) {
        author = last;
      }
    };
    while (program < end) {
      const auto opcode = static_cast<unsigned char>(*program++);
      if (opcode >= opcode_base) {
        const unsigned step = opcode - opcode_base;
        address += step / line_range * smallest;
        line += line_base + static_cast<int>(step % line_range);
        emit(false);
      } else if (opcode == 0) {
        const uint64_t length = read_unsigned(program);
        const char* const next = program + length;
        if (*program == DW_LNE_end_sequence) {
          emit(true);
          address = 0;
          file = 1;
          line = 1;
        } else if (*program == DW_LNE_set_address) {
          std::memcpy(&address, program + 1, sizeof address);
        }
        program = next;
      } else if (opcode == DW_LNS_copy) {
        emit(false);
      } else if (opcode == DW_LNS_advance_pc) {
        address += read_unsigned(program) * smallest;
      } else if (opcode == DW_LNS_advance_line) {
        line += read_signed(program);
      } else if (opcode == DW_LNS_set_file) {
        file = read_unsigned(program);
      } else if (opcode == DW_LNS_const_add_pc) {
        address += (255u - opcode_base) / line_range * smallest;
      } else if (opcode == DW_LNS_fixed_advance_pc) {
        uint16_t step;
        std::memcpy(&step, program, 2);
        address += step;
        program += 2;
      } else {
        for (char i = 0; i < lengths[opcode - 1]; ++i) {
          read_unsigned(program);
        }
      }
    }
  }

  enum : char { DW_LNE_end_sequence = 1, DW_LNE_set_address = 2 };
  enum : unsigned char {
    DW_LNS_copy = 1,
    DW_LNS_advance_pc = 2,
    DW_LNS_advance_line = 3,
    DW_LNS_set_file = 4,
    DW_LNS_const_add_pc = 8,
    DW_LNS_fixed_advance_pc = 9,
  };

  std::string path_;
  uintptr_t base_ = 0, begin_ = 0, end_ = 0;
  const char* bytes_ = nullptr;
  std::size_t size_ = 0;
  const char *lines_ = nullptr, *lines_end_ = nullptr;
  uintptr_t mark_ = 0;
  bool has_mark_ = false;
  std::vector<Symbol> functions_;
  std::vector<SharedVariable> shared_;
};

}  // namespace emulator
}  // namespace opk
