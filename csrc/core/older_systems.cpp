// Definitions of what newer headers take from a newer glibc or libstdc++, made of what the oldest supported ones have:
// glibc 2.28 and the libstdc++ of GCC 8 (manylinux_2_28). The linker takes these, so the library asks for no newer one.
#include <ios>
#include <new>
#include <sstream>
#include <string>

#if defined(__GLIBC__) && defined(__GLIBCXX__) && (defined(__x86_64__) || defined(__aarch64__))
#ifdef __x86_64__
#define FIRST_GLIBC "GLIBC_2.2.5"
#else
#define FIRST_GLIBC "GLIBC_2.17"
#endif

// glibc 2.29 has exp, log and exp2 that set no errno; the results of the older ones are the same.
__asm__(".symver older_exp, exp@" FIRST_GLIBC);
__asm__(".symver older_log, log@" FIRST_GLIBC);
__asm__(".symver older_exp2, exp2@" FIRST_GLIBC);
extern "C" {
double older_exp(double x);
double older_log(double x);
double older_exp2(double x);
double newer_exp(double x) __asm__("exp");
double newer_log(double x) __asm__("log");
double newer_exp2(double x) __asm__("exp2");
double newer_exp(double x) { return older_exp(x); }
double newer_log(double x) { return older_log(x); }
double newer_exp2(double x) { return older_exp2(x); }

// glibc 2.32: whether reference counts may do without atomic operations. Here never.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace attnjourney {

using Stream = std::stringstream;
using OutStream = std::ostringstream;
using Buffer = std::stringbuf;
using Mode = std::ios_base::openmode;

// What GCC 8 has: constructors that are told the mode, one str(), exception_ptr as a whole.
void construct(Stream*,
               Mode) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode");
void construct(OutStream*,
               Mode) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode");
std::string text_of(const OutStream*) __asm__("_ZNKSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv");
std::string text_of(const Buffer*) __asm__("_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
void copy_exception(void** to, void* const* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception(void** at) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// GCC 9 and 11.
void default_construct(Stream*) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void default_construct(OutStream*) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
std::string text_of_lvalue(const OutStream*) __asm__(
    "_ZNKRSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv");
std::string text_of_lvalue(const Buffer*) __asm__("_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string text_of_rvalue(Buffer*) __asm__("_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
void add_reference(void** exception) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release(void** exception) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
[[noreturn]] void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");

void default_construct(Stream* stream) { construct(stream, std::ios_base::in | std::ios_base::out); }
void default_construct(OutStream* stream) { construct(stream, std::ios_base::out); }
std::string text_of_lvalue(const OutStream* stream) { return text_of(stream); }
std::string text_of_lvalue(const Buffer* buffer) { return text_of(buffer); }
std::string text_of_rvalue(Buffer* buffer) { return text_of(buffer); }
void add_reference(void** exception) {
  void* another;  // never destroyed: the count stays
  copy_exception(&another, exception);
}
void release(void** exception) {
  destroy_exception(exception);
  *exception = nullptr;
}
void throw_bad_length() { throw std::bad_array_new_length(); }

}  // namespace attnjourney

#endif
