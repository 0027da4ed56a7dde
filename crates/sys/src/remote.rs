//! Memory of another process: the length of a write of which only the addresses are known.

use crate::check;
use std::io;

/// Maximum number of vectors in one call (`UIO_MAXIOV`).
const VECTORS_MAX: usize = 1024;
/// Vectors read at a time.
const BATCH: usize = 64;

/// Returns the total length of an array of `count` vectors (`struct iovec`) at `address` in the
/// process of thread `tid`.
///
/// # Errors
/// EINVAL for more vectors than a call accepts, EOVERFLOW for more bytes than a call can write;
/// EPERM, ESRCH, EFAULT as `process_vm_readv(2)`.
pub fn vectors_total(tid: u32, address: u64, count: u64) -> io::Result<u64> {
    let count = usize::try_from(count).ok().filter(|&count| count <= VECTORS_MAX);
    let count = count.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    let pid = libc::pid_t::try_from(tid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    let mut total = 0_u64;
    let mut done = 0;
    while done < count {
        let mut vectors = [[0_usize; 2]; BATCH];
        let some = BATCH.min(count - done);
        let bytes = some * size_of::<[usize; 2]>();
        let start = usize::try_from(address).unwrap_or_default().wrapping_add(done * size_of::<[usize; 2]>());
        let local = libc::iovec { iov_base: vectors.as_mut_ptr().cast(), iov_len: bytes };
        let remote = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: bytes };
        // SAFETY: the local vector covers the first `some` elements of `vectors`, for which any
        // bytes are valid; the remote one is only looked at in the other process.
        let read = check(
            unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) } as libc::c_long
        )?;
        if read != bytes {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        for [_, length] in vectors.iter().take(some) {
            total = total.checked_add(*length as u64).ok_or_else(|| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        }
        done += some;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_summed_up_over_batches() {
        let text = [0_u8; 200];
        let vectors: Vec<std::io::IoSlice<'_>> =
            (0..150).map(|length| std::io::IoSlice::new(&text[..length])).collect();
        let address = vectors.as_ptr() as u64;
        assert_eq!(vectors_total(std::process::id(), address, 150).unwrap(), (0..150).sum::<u64>());
        assert_eq!(vectors_total(std::process::id(), address, 0).unwrap(), 0);
        assert_eq!(vectors_total(std::process::id(), address, 1025).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(vectors_total(std::process::id(), 8, 1).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
}
