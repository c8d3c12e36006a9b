# Memory that leaves. The buffer protocol gives read-only views, which are obeyed. Through DLPack goes memory that the
# other side can write, and some write although it is flagged as read-only: such memory is lent, and watched. While it
# is lent, who keeps values for later copies them (Array.shared); what was kept before is there if its checksum is.

cdef Py_ssize_t last_lent = 0           # the value of `changes` when memory was last lent


cdef uint64_t checksum(const char *data, size_t nbytes) noexcept nogil:
    """Of every byte in its place: another value of one word always gives another checksum."""
    cdef uint64_t[4] lanes = [1, 2, 3, 4]
    cdef uint64_t[4] words
    cdef size_t i = 0, j
    while i < nbytes:
        if nbytes - i < sizeof(words):
            memset(words, 0, sizeof(words))
        memcpy(words, data + i, min(sizeof(words), nbytes - i))
        for j in range(4):
            lanes[j] = (lanes[j] ^ words[j]) * <uint64_t>0x9E3779B97F4A7C15     # odd: one to one
        i += sizeof(words)
    for j in range(1, 4):
        lanes[0] = (lanes[0] ^ (lanes[j] >> 29) ^ lanes[j]) * <uint64_t>0xBF58476D1CE4E5B9
    return lanes[0]


cdef void look_for_writes(Storage storage) noexcept:      # also called while an error is on its way
    """A write from outside into lent memory counts as a change in place, from when it is seen."""
    cdef uint64_t now
    with nogil:
        now = checksum(storage.data, storage.nbytes)
    if now != storage.seal:
        storage.seal = now
        mark_changed(storage)


cdef class Loan:
    """An array's memory for one who can write it; lent from the first buffer that is taken to the last given back."""
    cdef Array array

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef Storage storage = self.array.storage
        fill_buffer(self.array, buffer, flags & ~PyBUF_WRITABLE)
        buffer.obj = self
        if storage.shared:
            buffer.readonly = storage.foreign.readonly
        else:
            buffer.readonly = 0
            with cython.critical_section(storage):
                if storage.loans == 0:
                    storage.seal = checksum(storage.data, storage.nbytes)
                    word_write(&last_lent, word_count(&changes))
                storage.loans += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        cdef Storage storage = self.array.storage
        free(buffer.internal)
        if not storage.shared:
            with cython.critical_section(storage):
                look_for_writes(storage)
                storage.loans -= 1


def lend(Array x not None):
    """An object whose buffer is x's memory, writable unless it is read-only where it came from."""
    cdef Loan loan = Loan.__new__(Loan)
    loan.array = x
    return loan


def last_loan():
    """Number of the last time that memory was lent, among the in-place writes (see `change_count`)."""
    return word_read(&last_lent)


cdef class Buffered:
    """Base of Tensor: gives it the buffer protocol of the array that its `_readable` returns, or refuses."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        fill_buffer(self._readable("buffer", BufferError), buffer, flags)
