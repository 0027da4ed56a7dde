//! `ioctl(2)` with arguments that the kernel can transfer: it copies the sizes encoded in the command's number.

use crate::{
    door::{Door, caller},
    failure::Outcome,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Errno, Ioctl};

/// Results up to this size need no allocation; almost all commands of file systems have smaller ones.
const SMALL: usize = 256;

impl Door {
    pub(crate) fn ioctl(
        &self,
        header: &Header,
        fh: u64,
        flags: u32,
        request: Ioctl<'_>,
        out_size: u32,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        // A 32-bit process has other struct layouts; ENOTTY is the error of a file system without the command.
        if !self.options.ioctl || flags & (abi::flag::IOCTL_COMPAT | abi::flag::IOCTL_UNRESTRICTED) != 0 {
            return Err(Errno::ENOTTY.into());
        }
        if request.may_change() && !self.agreement().judges_flags {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let mut small = [0_u8; SMALL];
        let mut large = Vec::new();
        let wanted = out_size as usize;
        let output = match small.get_mut(..wanted) {
            Some(output) => output,
            None => {
                large.resize(wanted, 0);
                large.as_mut_slice()
            }
        };
        let (result, written) = match self.open.files.get(fh) {
            // The kernel opens a file for reading to change its flags, which the layer judges as a change.
            _ if request.may_change() => self.change_flags(header, request, output)?,
            Some(handle) if flags & abi::flag::IOCTL_DIR == 0 => handle.file.ioctl(request, output)?,
            _ => self.layer.ioctl(&caller(header), &self.node(header.nodeid)?, request, output)?,
        };
        Ok(reply.ioctl(result, output.get(..written).ok_or(Errno::EIO)?)?)
    }
}
