#include "base/file_error.h"

#include <signal.h>
#include <sys/resource.h>

#include <cerrno>
#include <system_error>

namespace fsdp::base {
namespace {

struct FileHint {
  int code;
  const char* hint;
};

constexpr FileHint kFileHints[] = {
    {ENOSPC,
     "free space on the disk, or use a directory on another one; with space left (df -h), it may be "
     "out of inodes (df -i)."},
    {EDQUOT,
     "your quota on this disk is used up (quota -s): delete files, ask for more, or use a directory "
     "on another disk."},
    {EFBIG,
     "the file would exceed the limit on file sizes (raise it: ulimit -f unlimited), or the largest "
     "that this file system can hold."},
    {EMFILE, "the process has too many open files: raise its limit (ulimit -n 65536)."},
    {ENFILE, "the system has too many open files: raise its limit (sysctl fs.file-max)."},
    {EROFS,
     "the file system is read-only: choose another directory, or mount it for writing; the kernel "
     "also does this after disk errors (dmesg)."},
    {EACCES, "check who may read and write the file and its directory (ls -ld)."},
    {EPERM, "check who may write the file and its directory (ls -ld), and its attributes (lsattr)."},
    {ENOENT, "check the path; the directory may have been moved or deleted in the meantime."},
    {ENOTDIR, "check the path: a part of it is a file, not a directory."},
    {EISDIR, "check the path: it is a directory, not a file."},
    {ENAMETOOLONG, "choose a shorter name."},
    {ELOOP, "check the path: its links lead in a circle."},
    {EIO,
     "the disk or the connection to it fails: check the kernel log (dmesg), and use another disk "
     "until it is repaired."},
    {ESTALE,
     "the server has replaced or deleted the file, or was restarted: check who else changes the "
     "directory, and mount it again."},
    {ETIMEDOUT, "the file server doesn't answer: check the network and the server."},
    {ENOTCONN, "the file system lost its connection: mount it again."},
    {EHOSTDOWN, "the file server doesn't answer: check the network and the server."},
    {EBUSY, "another program uses the file: end it, or choose another directory."},
    {ETXTBSY, "another program runs the file: end it, or choose another name."},
    {ENOLCK, "the file server is out of locks: check its lock service."},
    {ENOMEM, "the system is out of memory: end other programs."},
};

}  // namespace

std::string errno_text(int code) {
  return std::generic_category().message(code);
}

std::string file_hint(int code) {
  for (const FileHint& known : kFileHints)
    if (known.code == code) return known.hint;
  return "check the path and the kernel log (dmesg).";
}

void ignore_size_signal() {
  struct sigaction now {};
  if (::sigaction(SIGXFSZ, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
    ::signal(SIGXFSZ, SIG_IGN);
}

void allow_many_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace fsdp::base
