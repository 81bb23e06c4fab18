/* Counts the system calls that change files below one folder, and kills at one of them: preloaded by benchmarks/crash.py.

A point is a call before it is made; a `write` that is chosen is made by half first. Each is a line of the log, "CALL TAB PATH TAB
OTHER PATH TAB OFFSET TAB BYTES", paths relative to the folder; if asked for, the bytes of a write follow. Until crash_begin is
called, and for all other files, nothing happens. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX], chosen[3 * PATH_MAX];
static int occurrence, alone, with_bytes, log_to = -1;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

static void die(void) {
    kill(alone ? getpid() : 0, SIGKILL);
    for (;;) pause();
}

static void put(const void *bytes, size_t count) {
    for (const char *at = bytes; count;) {
        ssize_t done = syscall(SYS_write, log_to, at, count);
        if (done <= 0) _exit(99);
        at += done, count -= done;
    }
}

/* The name of a file without what is another one each time: that of a temporary file, or the number of the process at its end. */
static const char *lasting(const char *path, char *to) {
    char own[32];
    snprintf(own, sizeof own, ".%d", getpid());
    snprintf(to, PATH_MAX, "%s", path);
    char *found = strstr(to, "/.tmp");
    if (found && strlen(found) == 11) strcpy(found + 5, "#");
    if ((found = strstr(to, own))) memmove(found + 2, found + strlen(own), strlen(found + strlen(own)) + 1), found[1] = '#';
    return to;
}

/* Notes a point; returns whether to die there. */
static int noted(const char *call, const char *path, const char *other, long offset, const void *bytes, size_t count) {
    char line[3 * PATH_MAX], a[PATH_MAX], b[PATH_MAX];
    path = lasting(path, a), other = lasting(other, b);
    pthread_mutex_lock(&one);
    if (with_bytes) flock(log_to, LOCK_EX);  /* one log for all ranks: what waits for another one's call is noted after it */
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", call, path, other, offset, count);
    put(line, length);
    if (with_bytes && bytes) put(bytes, count);
    if (with_bytes) flock(log_to, LOCK_UN);
    snprintf(line, sizeof line, "%s\t%s\t%s", call, path, other);
    int now = *chosen && !strcmp(line, chosen) && --occurrence == 0;
    if (!now) pthread_mutex_unlock(&one);  /* who dies lets no other thread go on */
    return now;
}

void crash_begin(const char *folder, int log, int bytes, const char *point, int nth, int self) {
    strcpy(root, folder), strcpy(chosen, point);
    occurrence = nth, alone = self, with_bytes = bytes, log_to = log;
}

void crash_point(const char *name) {
    if (log_to >= 0 && noted("at", name, "", 0, NULL, 0)) die();
}

static const char *below(const char *path) {
    size_t length = strlen(root);
    return log_to >= 0 && !strncmp(path, root, length) && path[length] == '/' ? path + length + 1 : NULL;
}

static const char *of_descriptor(int fd, char *to) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = log_to < 0 ? -1 : readlink(link, to, PATH_MAX - 1);
    if (length < 0) return NULL;
    to[length] = 0;
    return below(to);
}

static const char *of_path(int at, const char *path, char *to) {
    if (log_to < 0) return NULL;
    if (*path == '/') snprintf(to, PATH_MAX, "%s", path);
    else if (at == AT_FDCWD) {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here) || snprintf(to, PATH_MAX, "%s/%s", here, path) >= PATH_MAX) return NULL;
    } else {
        char folder[PATH_MAX];
        const char *relative = of_descriptor(at, folder);
        if (!relative || snprintf(to, PATH_MAX, "%s/%s", folder, path) >= PATH_MAX) return NULL;
    }
    return below(to);
}

static void call_at(const char *call, int at, const char *path) {
    char to[PATH_MAX];
    const char *name = of_path(at, path, to);
    if (name && noted(call, name, "", 0, NULL, 0)) die();
}

static void call_on(const char *call, int fd, long offset) {
    char to[PATH_MAX];
    const char *name = of_descriptor(fd, to);
    if (name && noted(call, name, "", offset, NULL, 0)) die();
}

static void opened(int at, const char *path, int flags) {
    if (!(flags & (O_CREAT | O_TRUNC))) return;
    char to[PATH_MAX];
    const char *name = of_path(at, path, to);
    if (!name) return;
    if (access(to, F_OK)) call_at("create", at, path);
    else if (flags & O_TRUNC) call_at("truncate", at, path);
}

/* The bytes of a write that may still be made: all, or half of them by somebody who then dies. */
static int written(int fd, const void *bytes, size_t count, long offset) {
    char to[PATH_MAX];
    const char *name = of_descriptor(fd, to);
    if (!name) return 0;
    struct stat about;
    if (offset < 0) offset = fcntl(fd, F_GETFL) & O_APPEND ? (fstat(fd, &about), about.st_size) : lseek(fd, 0, SEEK_CUR);
    return noted("write", name, "", offset, bytes, count);
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE REAL(open); opened(AT_FDCWD, path, flags); return real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(open64); opened(AT_FDCWD, path, flags); return real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE REAL(openat); opened(at, path, flags); return real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE REAL(openat64); opened(at, path, flags); return real(at, path, flags, mode); }
static int flags_of(const char *mode) { return *mode == 'w' ? O_CREAT | O_TRUNC : *mode == 'a' ? O_CREAT : 0; }
FILE *fopen(const char *path, const char *mode) { REAL(fopen); opened(AT_FDCWD, path, flags_of(mode)); return real(path, mode); }
FILE *fopen64(const char *path, const char *mode) { REAL(fopen64); opened(AT_FDCWD, path, flags_of(mode)); return real(path, mode); }

ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(write);
    if (written(fd, bytes, count, -1)) real(fd, bytes, count / 2), die();
    return real(fd, bytes, count);
}
ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset) {
    REAL(pwrite);
    if (written(fd, bytes, count, offset)) real(fd, bytes, count / 2, offset), die();
    return real(fd, bytes, count, offset);
}
ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) {
    REAL(pwrite64);
    if (written(fd, bytes, count, offset)) real(fd, bytes, count / 2, offset), die();
    return real(fd, bytes, count, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int many) {  /* as single writes, which the kernel may do as well */
    REAL(writev);
    char to[PATH_MAX];
    if (!of_descriptor(fd, to)) return real(fd, parts, many);
    ssize_t all = 0;
    for (int i = 0; i < many; i++) {
        ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (done < 0) return all ? all : done;
        all += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return all;
}
size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {  /* numpy's: flushed at once, to keep the order */
    REAL(fwrite);
    char to[PATH_MAX];
    if (!of_descriptor(fileno(file), to)) return real(bytes, size, count, file);
    if (written(fileno(file), bytes, size * count, ftell(file))) real(bytes, size, count / 2, file), fflush(file), die();
    size_t done = real(bytes, size, count, file);
    fflush(file);
    return done;
}

#define SENT(name) ssize_t name(int to, int from, off_t *offset, size_t count) { /* shutil then writes, which is seen */ \
    REAL(name); char path[PATH_MAX]; \
    if (of_descriptor(to, path)) return errno = EINVAL, -1; \
    return real(to, from, offset, count); }
SENT(sendfile)
SENT(sendfile64)

int fsync(int fd) { REAL(fsync); call_on("fsync", fd, 0); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); call_on("fsync", fd, 0); return real(fd); }
int ftruncate(int fd, off_t length) { REAL(ftruncate); call_on("resize", fd, length); return real(fd, length); }
int ftruncate64(int fd, off64_t length) { REAL(ftruncate64); call_on("resize", fd, length); return real(fd, length); }
int unlink(const char *path) { REAL(unlink); call_at("unlink", AT_FDCWD, path); return real(path); }
int rmdir(const char *path) { REAL(rmdir); call_at("rmdir", AT_FDCWD, path); return real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); if (access(path, F_OK)) call_at("mkdir", AT_FDCWD, path); return real(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { REAL(mkdirat); if (faccessat(at, path, F_OK, 0)) call_at("mkdir", at, path); return real(at, path, mode); }
int unlinkat(int at, const char *path, int flags) { REAL(unlinkat); call_at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", at, path); return real(at, path, flags); }

static void renamed(int from, const char *old, int into, const char *new) {
    char a[PATH_MAX], b[PATH_MAX];
    const char *source = of_path(from, old, a), *target = of_path(into, new, b);
    if (source && target && noted("rename", source, target, 0, NULL, 0)) die();
}
int rename(const char *old, const char *new) { REAL(rename); renamed(AT_FDCWD, old, AT_FDCWD, new); return real(old, new); }
int renameat(int from, const char *old, int into, const char *new) { REAL(renameat); renamed(from, old, into, new); return real(from, old, into, new); }
int renameat2(int from, const char *old, int into, const char *new, unsigned flags) { REAL(renameat2); renamed(from, old, into, new); return real(from, old, into, new, flags); }
