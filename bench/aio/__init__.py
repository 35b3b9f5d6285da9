"""The disk, by our requests and by fio's and libaio's."""
